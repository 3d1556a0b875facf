"""Starts Spark sessions: finds a Java, chooses settings, creates the session."""
