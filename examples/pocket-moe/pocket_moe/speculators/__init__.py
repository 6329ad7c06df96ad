"""Small models that draft for the large one."""
