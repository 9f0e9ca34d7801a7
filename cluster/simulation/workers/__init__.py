"""Simulated workers, whole: `worker` is a prefill or a decode worker; beside it what its steps take (`steps`), what it
guesses (`speculation`), its host memory (`host_tier`), and the links between workers (`links`)."""
