/* The reader behind a relay: NUM_SAMPLES streams at once, each event's latency, one JSON object.
 *
 *     sse_client NUM_SAMPLES SECONDS MAX_TOKENS RECEIVED PORT...
 *
 * Streams go round the ports (of 127.0.0.1). When all of them flow and half a second more has passed it prints
 * "started", counts for SECONDS, and prints {tokens, seconds, reads, latency_ms}. A sample that ends (MAX_TOKENS; less in
 * the first one, so that not all end together) is followed by another on the same connection. An answer other than 200,
 * a connection that breaks and streams that do not all flow within START_S are failures: a line on stderr, status 1.
 *
 * RECEIVED is a file of eight bytes in which it counts all tokens, for the fake engines to see (sse_worker.c).
 * Latency is from the `sent_ns` in an event to the return of the recv that brought the end of it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STARTING = 128, START_S = 60, MAX_LATENCY_US = 10000000, BODY_BYTES = 4096 };

typedef enum { IN_HEAD, IN_SIZE, IN_DATA, AFTER_DATA, IN_TRAILER } Place; /* in a chunked answer */

typedef struct {
    int fd, is_flowing;
    Place place;
    int matched;        /* characters of MARK, or of the blank line that ends a head or a trailer */
    long left;          /* bytes of the chunk to come */
    int64_t sent_ns;
    char status[16];    /* how the head begins */
    int head_len;
} Stream;

static const char MARK[] = "\"sent_ns\":";
static const int MARK_LEN = sizeof MARK - 1;
static Stream *streams;
static int num_samples, num_started, num_flowing, max_tokens, num_ports, epoll, is_counting;
static char **ports;
static char prompt[BODY_BYTES];
static int64_t num_tokens, num_reads;
static _Atomic int64_t *num_received;
static uint32_t *latencies; /* how many took so many microseconds */

static void fail(const char *what, const char *detail) {
    fprintf(stderr, "%s: %s\n", what, detail);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void ask(Stream *stream, int num_wanted) {
    char body[BODY_BYTES + 256], request[BODY_BYTES + 512];
    int body_len = sprintf(body, "{\"input_ids\":[%s],\"sampling_params\":{\"temperature\":1.0,\"max_new_tokens\":%d},"
                                 "\"stream\":true,\"return_logprob\":true}", prompt, num_wanted);
    int len = sprintf(request, "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                               "Content-Length: %d\r\n\r\n%s", body_len, body);
    stream->place = IN_HEAD, stream->matched = stream->head_len = 0;
    if (send(stream->fd, request, len, MSG_NOSIGNAL) != len) fail("a request was not sent", strerror(errno));
}

static void open_stream(int number) {
    Stream *stream = &streams[number];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons(atoi(ports[number % num_ports]));
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
    int one = 1;
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(stream->fd, (struct sockaddr *)&address, sizeof address)) fail("connect", strerror(errno));
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, stream->fd, &event)) fail("epoll_ctl", strerror(errno));
    ask(stream, max_tokens > 1 ? 1 + (int)(number * 2654435761u % max_tokens) : 1);
}

static void count_event(Stream *stream, int64_t now) {
    if (!stream->is_flowing) stream->is_flowing = 1, num_flowing++;
    atomic_fetch_add_explicit(num_received, 1, memory_order_relaxed);
    if (!is_counting) return;
    int64_t us = (now - stream->sent_ns) / 1000;
    latencies[us < 0 ? 0 : us < MAX_LATENCY_US ? us : MAX_LATENCY_US - 1]++;
    num_tokens++;
}

/* An event is counted at the brace after its sent_ns; it may come in pieces. */
static void read_events(Stream *stream, const char *at, const char *end, int64_t now) {
    for (; at < end; at++) {
        if (stream->matched == MARK_LEN) {
            if (*at >= '0' && *at <= '9') stream->sent_ns = 10 * stream->sent_ns + (*at - '0');
            else if (*at != ' ') count_event(stream, now), stream->matched = 0;
        } else if (*at == MARK[stream->matched]) {
            if (++stream->matched == MARK_LEN) stream->sent_ns = 0;
        } else {
            stream->matched = *at == MARK[0];
        }
    }
}

/* True when the blank line has been seen. */
static int at_blank_line(Stream *stream, char c) {
    stream->matched = c == "\r\n\r\n"[stream->matched] ? stream->matched + 1 : c == '\r';
    return stream->matched == 4;
}

static int hex(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

static void read_head(Stream *stream, char c) {
    if (stream->head_len < 15) stream->status[stream->head_len++] = c;
    if (!at_blank_line(stream, c)) return;
    if (strncmp(stream->status + 8, " 200", 4)) fail("the answer is not 200", stream->status);
    stream->place = IN_SIZE, stream->left = stream->matched = 0;
}

static void read_size(Stream *stream, char c) {
    if (hex(c) >= 0) stream->left = 16 * stream->left + hex(c);
    if (c != '\n') return;
    stream->place = stream->left ? IN_DATA : IN_TRAILER;
    if (!stream->left) stream->matched = 2; /* the line that ended the size is the first half of the blank line */
}

static void read_bytes(Stream *stream, const char *at, const char *end, int64_t now) {
    while (at < end) {
        if (stream->place == IN_DATA) {
            const char *stop = end - at < stream->left ? end : at + stream->left;
            read_events(stream, at, stop, now);
            stream->left -= stop - at;
            at = stop;
            if (stream->left == 0) stream->place = AFTER_DATA;
            continue;
        }
        char c = *at++;
        if (stream->place == IN_HEAD) read_head(stream, c);
        else if (stream->place == IN_SIZE) read_size(stream, c);
        else if (stream->place == AFTER_DATA && c == '\n') stream->place = IN_SIZE;
        else if (stream->place == IN_TRAILER && at_blank_line(stream, c)) ask(stream, max_tokens);
    }
}

static void take(Stream *stream) {
    static char buffer[65536];
    ssize_t got = recv(stream->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) fail("a stream broke", got ? strerror(errno) : "closed by the other side");
    num_reads += is_counting;
    read_bytes(stream, buffer, buffer + got, now_ns());
}

/* A few at a time: a burst of thousands of connections is not what is measured. */
static void open_some(void) {
    while (num_started < num_samples && num_started - num_flowing < MAX_STARTING) open_stream(num_started++);
}

static void poll_until(int64_t deadline_ns) {
    struct epoll_event events[512];
    int64_t left_ns = deadline_ns - now_ns();
    int num = epoll_wait(epoll, events, 512, left_ns > 0 ? (int)(left_ns / 1000000 + 1) : 0);
    for (int i = 0; i < num; i++) take(events[i].data.ptr);
}

static void open_received(const char *path) {
    int fd = open(path, O_RDWR);
    num_received = mmap(NULL, sizeof *num_received, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (num_received == MAP_FAILED) fail(path, strerror(errno));
}

static double quantile_ms(double q) {
    int64_t seen = 0, wanted = (int64_t)(q * num_tokens);
    for (int us = 0; us < MAX_LATENCY_US; us++)
        if ((seen += latencies[us]) > wanted) return us / 1e3;
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: sse_client NUM_SAMPLES SECONDS MAX_TOKENS RECEIVED PORT...\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    num_samples = atoi(argv[1]), max_tokens = atoi(argv[3]), num_ports = argc - 5, ports = argv + 5;
    open_received(argv[4]);
    streams = calloc(num_samples, sizeof *streams);
    latencies = calloc(MAX_LATENCY_US, sizeof *latencies);
    epoll = epoll_create1(0);
    for (int i = 0, len = 0; i < 64; i++) len += sprintf(prompt + len, "%s%d", i ? "," : "", 1000 + i);

    int64_t deadline = now_ns() + START_S * 1000000000LL;
    while (num_flowing < num_samples) {
        open_some();
        poll_until(deadline);
        if (now_ns() > deadline) fail("not all streams flow", "deadline passed");
    }
    for (int64_t end = now_ns() + 500000000; now_ns() < end;) poll_until(end);
    printf("started\n");
    fflush(stdout);
    is_counting = 1;
    int64_t start = now_ns(), end = start + (int64_t)(atof(argv[2]) * 1e9);
    while (now_ns() < end) poll_until(end);
    printf("{\"tokens\": %lld, \"seconds\": %.3f, \"reads\": %lld, \"latency_ms\": {\"p50\": %.3f, \"p99\": %.3f}}\n",
           (long long)num_tokens, (now_ns() - start) / 1e9, (long long)num_reads, quantile_ms(0.5), quantile_ms(0.99));
    return 0;
}
