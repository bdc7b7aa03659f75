"""The frameworks that ds_kfac serves, one adapter each."""
