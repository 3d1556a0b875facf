"""The tiering service: a Spark application that moves tables into the lake, exactly once."""
