"""The side of Locust: the file that its master and workers load.  Apart, since Locust puts this folder on sys.path."""
