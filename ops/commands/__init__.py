"""One module for each command of `pagemill`, imported only when that command runs."""
