"""Spark beside zufluss: a session that works, tables as DataFrames."""
