"""Adapters to evaluation tools, each imported only where its tool is installed."""
