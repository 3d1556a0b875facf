"""The hot messages: PRODUCE_LOG, PUT_KV and FETCH_LOG, encoded and decoded by hand.

Protobuf copies every `bytes` field, which for these messages is the payload: 1 MiB of records costs
several hundred microseconds and twice the memory. Here a writer keeps the records as the buffers
they came in, and a reader returns positions in the received buffer or views of it. Each module has
both directions and the one table of the layout. Every other message goes through protobuf
(`wire/codec.py`). Kernels for the smallest PRODUCE_LOG and LOOKUP requests stand in
`record/kernels/produce.py` and `record/kernels/lookup.py`; clients do not load those.
"""
