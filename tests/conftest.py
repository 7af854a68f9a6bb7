"""What holds for every test, before anything imports torch."""

from pensieve.launch.cpu_threads import prepare_threads

prepare_threads()
