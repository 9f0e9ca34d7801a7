"""One model on one device: weights, paged KV cache, batches, sampling. Knows no Ray, no HTTP and no sockets."""
