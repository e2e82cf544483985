"""The page of a plan: what was compiled, drawn as one HTML file that needs nothing beside itself."""
