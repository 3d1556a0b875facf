"""Writers: rows in any form the user has, sent as acknowledged batches."""
