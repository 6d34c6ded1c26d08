/* For LD_PRELOAD: the clock on the wall is as many seconds ahead as a file in $TEST_CLOCKS says: the one with the name
   of the process, or else `all`. Files keep the times of the machine, and so does the monotonic clock, as neither jumps
   where somebody sets a clock. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void)
{
    const char *folder = getenv("TEST_CLOCKS");
    char name[16], path[4096], text[32];
    int before = errno, file = -1;
    ssize_t size = -1;

    if (folder && !prctl(PR_GET_NAME, name)) {
        snprintf(path, sizeof path, "%s/%s", folder, name);
        file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            snprintf(path, sizeof path, "%s/all", folder);
            file = open(path, O_RDONLY | O_CLOEXEC);
        }
    }
    if (file >= 0) {
        size = read(file, text, sizeof text - 1);
        close(file);
    }
    errno = before;
    if (size < 0)
        return 0;
    text[size] = 0;
    return atol(text);
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed)
        now->tv_sec += ahead();
    return failed;
}

time_t time(time_t *to)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to)
        *to = now.tv_sec;
    return now.tv_sec;
}
