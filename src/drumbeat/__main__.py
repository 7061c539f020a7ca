from drumbeat.cli import program

program()
