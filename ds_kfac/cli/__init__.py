"""The ``ds-kfac`` console command."""
