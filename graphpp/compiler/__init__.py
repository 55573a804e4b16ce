"""TODO graphpp.compiler.build."""
