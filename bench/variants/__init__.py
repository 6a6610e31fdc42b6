"""One thing to measure a file. A variant is set up once and then sampled in turns with the others."""
