"""The tablet server: owns bucket replicas and serves writes and reads on them."""
