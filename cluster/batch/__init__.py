"""Many requests in one file, answered into another one: the folder of files and batches, which outlives a gateway; the
lines, who sends them, and who sees that it goes on."""
