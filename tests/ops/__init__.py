"""What people run us with — compose, images, README — held against the code."""
