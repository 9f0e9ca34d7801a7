"""Host memory as a tier: shared with the workers of a node, outliving its owner."""
