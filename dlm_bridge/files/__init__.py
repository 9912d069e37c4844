"""Files, for every other package: atomic output (`atomic`, `partial`), safe reading (`reading`, `pickles`)."""
