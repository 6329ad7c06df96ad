"""The one name that a wheel of expertmesh brings into an environment."""
