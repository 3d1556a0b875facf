"""Remote files: locations, what each bucket has there, cleaning up."""
