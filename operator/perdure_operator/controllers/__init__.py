"""What is done when an object of the cluster changes: level-triggered, one object at a time, safe to repeat."""
