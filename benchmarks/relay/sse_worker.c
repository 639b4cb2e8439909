/* A fake engine fleet: NUM_ENGINES servers on ports of their own that stream like SGLang, one event a token.
 *
 *     sse_worker NUM_ENGINES STEP_US [RECEIVED]      prints {"ports": [...]}, then serves until it is killed
 *
 * POST with max_new_tokens in the body starts a sample. Every STEP_US an engine sends one event to each of its samples,
 * as a decode step does; the engines' steps are staggered. An event carries the CLOCK_MONOTONIC time it was sent at.
 * Any GET is answered with what routers ask a worker for (health, model and server information).
 *
 * A late step is made up for, a few at most. A sample whose socket is full does not get its token. With RECEIVED, a file in
 * which the reader counts its tokens, steps also wait while as many tokens are under way as there are samples: so a relay
 * is saturated without a queue that grows, and events still travel one by one.
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
#include <strings.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ENGINES = 256, MAX_FDS = 65536, MAX_REQUEST = 16384, MAX_OWED = 4 };

#define EVENT_BYTES 333
#define EVENT                                                                                                          \
    "data: {\"text\":\" token\",\"output_ids\":[123456],\"meta_info\":{\"id\":\"5f0c3a9e7b1d4c28a6e9d0f1b2c3d4e5\","   \
    "\"finish_reason\":null,\"prompt_tokens\":64,\"weight_version\":\"default\",\"output_token_logprobs\":"            \
    "[[-0.6931471805599453,123456,null]],\"completion_tokens\":%8d,\"cached_tokens\":0,\"e2e_latency\":0.5312451873,"  \
    "\"sent_ns\":%20lld}}"
#define HEAD "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
#define LAST "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
/* No model_path or tokenizer_path: sglang-router would try to download the tokenizer. */
#define ABOUT                                                                                                          \
    "{\"status\":\"ok\",\"served_model_name\":\"fake\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,"             \
    "\"version\":\"0\",\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\",\"owned_by\":\"fake\"}]}"

typedef struct {
    int fd, engine, place; /* place: where it is among its engine's samples; -1 while it generates nothing */
    int num_tokens, max_tokens;
    int in_len, out_len;
    char in[MAX_REQUEST], out[1024]; /* out: what the socket has not taken yet */
} Conn;

typedef struct {
    int listener, timer, owed, num_samples, max_samples;
    Conn **samples;
} Engine;

static Engine engines[MAX_ENGINES];
static Conn *conns[MAX_FDS];
static int num_engines, num_samples, epoll;
static int64_t num_sent;
static _Atomic int64_t *num_received; /* or none */

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void watch(int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
}

static void add_sample(Conn *conn) {
    Engine *engine = &engines[conn->engine];
    if (engine->num_samples == engine->max_samples) {
        engine->max_samples = engine->max_samples ? 2 * engine->max_samples : 64;
        engine->samples = realloc(engine->samples, engine->max_samples * sizeof *engine->samples);
        if (!engine->samples) die("realloc");
    }
    num_samples++;
    conn->place = engine->num_samples++;
    engine->samples[conn->place] = conn;
}

static void drop_sample(Conn *conn) {
    Engine *engine = &engines[conn->engine];
    Conn *last = engine->samples[--engine->num_samples];
    num_samples--;
    engine->samples[conn->place] = last;
    last->place = conn->place;
    conn->place = -1;
}

static void hang_up(Conn *conn) {
    if (conn->place >= 0) drop_sample(conn);
    conns[conn->fd] = NULL;
    close(conn->fd);
    free(conn);
}

/* True if the socket took all of it. */
static int flush(Conn *conn) {
    ssize_t sent = send(conn->fd, conn->out, conn->out_len, MSG_NOSIGNAL);
    if (sent > 0) memmove(conn->out, conn->out + sent, conn->out_len -= sent);
    return conn->out_len == 0;
}

static void say(Conn *conn, const char *text) {
    size_t len = strlen(text);
    memcpy(conn->out + conn->out_len, text, len);
    conn->out_len += len;
}

static void send_token(Conn *conn) {
    if (conn->out_len && !flush(conn)) return;
    if (conn->num_tokens == conn->max_tokens) {
        drop_sample(conn);
        return;
    }
    conn->out_len = sprintf(conn->out, "%x\r\n" EVENT "\n\n\r\n", EVENT_BYTES, ++conn->num_tokens, (long long)now_ns());
    num_sent++;
    if (conn->num_tokens == conn->max_tokens) say(conn, LAST);
    if (flush(conn) && conn->num_tokens == conn->max_tokens) drop_sample(conn);
}

static void step(Engine *engine) {
    for (int i = engine->num_samples - 1; i >= 0; i--) send_token(engine->samples[i]);
}

static void answer(Conn *conn, char *body) {
    char *limit = strstr(body, "\"max_new_tokens\":");
    if (strncmp(conn->in, "POST", 4) || !limit) {
        conn->out_len = sprintf(conn->out,
                                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                                strlen(ABOUT), ABOUT);
        flush(conn);
        return;
    }
    conn->num_tokens = 0;
    conn->max_tokens = atoi(limit + strlen("\"max_new_tokens\":"));
    say(conn, HEAD);
    flush(conn);
    add_sample(conn);
}

static void take_request(Conn *conn) {
    ssize_t got = recv(conn->fd, conn->in + conn->in_len, MAX_REQUEST - 1 - conn->in_len, 0);
    if (got <= 0) {
        if (got == 0 || errno != EAGAIN) hang_up(conn);
        return;
    }
    conn->in[conn->in_len += got] = 0;
    char *body = strstr(conn->in, "\r\n\r\n");
    if (!body) return;
    body += 4;
    char *length = strcasestr(conn->in, "\r\ncontent-length:");
    long body_len = length && length < body ? atol(length + strlen("\r\ncontent-length:")) : 0;
    if (conn->in + conn->in_len - body < body_len) return;
    conn->in_len = 0;
    answer(conn, body);
}

static void accept_all(int number) {
    int fd, one = 1;
    while ((fd = accept4(engines[number].listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (fd >= MAX_FDS) die("too many connections");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Conn *conn = conns[fd] = calloc(1, sizeof *conn);
        if (!conn) die("calloc");
        conn->fd = fd, conn->engine = number, conn->place = -1;
        watch(fd);
    }
}

static int open_engine(int number, long step_us) {
    Engine *engine = &engines[number];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    engine->listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(engine->listener, (struct sockaddr *)&address, len) || listen(engine->listener, 4096)) die("listen");
    getsockname(engine->listener, (struct sockaddr *)&address, &len);
    watch(engine->listener);
    long first_ns = 1000 * step_us * (number + 1) / num_engines;
    struct itimerspec every = {{step_us / 1000000, step_us % 1000000 * 1000}, {first_ns / 1000000000, first_ns % 1000000000}};
    engine->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    if (engine->timer < 0 || timerfd_settime(engine->timer, 0, &every, NULL)) die("timerfd");
    watch(engine->timer);
    return ntohs(address.sin_port);
}

static void handle(int fd) {
    if (conns[fd]) {
        take_request(conns[fd]);
        return;
    }
    for (int i = 0; i < num_engines; i++) {
        uint64_t ticks;
        if (fd == engines[i].listener) accept_all(i);
        if (fd == engines[i].timer && read(fd, &ticks, sizeof ticks) == sizeof ticks) engines[i].owed += ticks;
        if (engines[i].owed > MAX_OWED) engines[i].owed = MAX_OWED;
    }
}

static int is_full(void) {
    return num_received && num_sent - atomic_load_explicit(num_received, memory_order_relaxed) >= num_samples;
}

static void open_received(const char *path) {
    int fd = open(path, O_RDONLY);
    num_received = mmap(NULL, sizeof *num_received, PROT_READ, MAP_SHARED, fd, 0);
    if (num_received == MAP_FAILED) die(path);
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4 || (num_engines = atoi(argv[1])) < 1 || num_engines > MAX_ENGINES || atol(argv[2]) < 1) {
        fprintf(stderr, "usage: sse_worker NUM_ENGINES STEP_US [RECEIVED]\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (snprintf(NULL, 0, EVENT "\n\n", 0, 0LL) != EVENT_BYTES) {
        fprintf(stderr, "an event has %d bytes\n", snprintf(NULL, 0, EVENT "\n\n", 0, 0LL));
        return 1;
    }
    if (argc == 4) open_received(argv[3]);
    epoll = epoll_create1(0);
    for (int i = 0; i < num_engines; i++) printf("%s%d", i ? ", " : "{\"ports\": [", open_engine(i, atol(argv[2])));
    printf("]}\n");
    fflush(stdout);
    struct epoll_event events[512];
    for (int is_behind = 0;;) {
        int num = epoll_wait(epoll, events, 512, is_behind ? 0 : -1);
        for (int i = 0; i < num; i++) handle(events[i].data.fd);
        is_behind = 0;
        for (int i = 0; i < num_engines; i++) {
            if (engines[i].owed == 0) continue;
            is_behind = 1;
            if (is_full()) continue;
            step(&engines[i]);
            engines[i].owed--;
        }
        if (is_behind && is_full()) usleep(50); /* the reader may be on this core */
    }
}
