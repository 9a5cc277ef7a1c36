"""Whether the rows of a padded graph stay apart: what each dispatched operator does to rows."""
