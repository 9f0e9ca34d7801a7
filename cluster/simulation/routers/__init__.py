"""Who places requests in a simulation: Legato's scheduler, and what others publish."""
