"""One request on the cluster: placed, sent to workers, streamed, tried again elsewhere, written down."""
