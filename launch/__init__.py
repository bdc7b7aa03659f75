"""Training scripts and launch commands; not part of the installed package."""
