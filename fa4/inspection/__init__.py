"""What was generated for a request, and what it costs: PTX, SASS, resources, instruction counts by loop and by source line."""
