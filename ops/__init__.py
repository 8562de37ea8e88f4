"""For the people who run Pagemill: the command line, the bench, metrics."""
