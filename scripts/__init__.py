"""Commands around the app: runs, data, benchmarks, deployments."""
