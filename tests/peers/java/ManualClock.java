package org.apache.fluss.utils.clock;

import java.time.Duration;
import java.util.concurrent.TimeUnit;

/**
 * Stands in for the clock that Fluss's tests move: it shows the machine's time, which the server
 * has as well, and waits when it is to be advanced. It does not go back.
 */
public final class ManualClock implements Clock {
    public ManualClock() {}

    public ManualClock(long startMs) {}

    @Override
    public long milliseconds() {
        return System.currentTimeMillis();
    }

    @Override
    public long nanoseconds() {
        return TimeUnit.MILLISECONDS.toNanos(milliseconds());
    }

    public void advanceTime(Duration duration) {
        advanceTime(duration.toMillis(), TimeUnit.MILLISECONDS);
    }

    public void advanceTime(long duration, TimeUnit unit) {
        try {
            unit.sleep(duration);
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }
}
