"""What is measured of a trained model."""
