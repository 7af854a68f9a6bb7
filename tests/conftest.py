"""What holds for every test, before anything imports torch."""

from pensieve.launch.cpu_threads import spin_briefly

spin_briefly()
