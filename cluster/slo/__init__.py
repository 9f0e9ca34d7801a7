"""What requests are promised, and how well that is kept."""
