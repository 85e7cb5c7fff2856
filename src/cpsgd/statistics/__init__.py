"""Private statistics over points: k-means and principal components."""
