"""What a report is written as: the HTML page, the README of a results folder, sentences."""
