"""Many requests in one file, answered into another one: the folder of files, batches and responses, which outlives a
gateway; the lines, who sends them, and who sees that it goes on."""
