"""Setting up Spark: a Java that works, settings that work, and the session made of both."""
