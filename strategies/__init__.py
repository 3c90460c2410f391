"""Server side: training strategies, the operators they use and the ServerApp."""
