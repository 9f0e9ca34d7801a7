"""Many requests in one file, answered into another one: the lines, who sends them, and who sees that it goes on."""
