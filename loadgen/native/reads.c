/* reads.c - reads all sockets that have something to say in one call, and takes out what needs no thought.
 *
 * Most of what a streaming server sends is one HTTP chunk with one event that differs from the last in its text alone.
 * A socket is armed with what stands around that text; every whole chunk of that form is stored here, its text and
 * the moment it was read, without waking the interpreter.  All else - the head, the first and the last events, errors,
 * what arrives in parts, the end of the connection - is handed over as a notice: the stored events first, then the
 * bytes behind them as they came.  A notice disarms its socket: only the reader of HTTP knows when it is between two
 * chunks again.  One thread calls; nothing here blocks.
 * Build: cc -O2 -Wall -Wextra -shared -fPIC -o reads.so reads.c */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READY = 512, READ_BYTES = 64 << 10, STORED_BYTES = 256 << 10, KEPT_BYTES = 64 << 10 };

struct slot {
    int fd;              /* < 0: free */
    uint32_t generation; /* of its user; an event of an earlier one is stale */
    int armed;
    char *frame;         /* what stands before the text, then what stands behind it */
    size_t head, tail, frame_cap;
    size_t most, room;   /* bytes: of one chunk's body; of all that may still be stored */
    int64_t *stamps;     /* CLOCK_MONOTONIC ns of each stored event */
    size_t n, stamps_cap;
    char *text;          /* the texts, each followed by NUL */
    size_t text_len, text_cap, body;
};
/* What is handed over; offsets are into the caller's buffer.  size: bytes as they came; 0: the peer closed; < 0:
 * -errno; NOTHING: only stored events, the socket stays armed.  The stamps lie at `at` (8-byte aligned), the texts
 * behind them, the bytes behind those.  body: bytes of body that the stored events made up. */
struct notice {
    int32_t slot, size;
    int64_t now;
    uint32_t at, n, text_len, body;
};
enum { NOTHING = -0x7fffffff };
struct reads {
    int ep;
    struct slot *slots;
    int n_slots;
    struct epoll_event ready[READY];
    int n_ready, next;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct reads *reads_new(void) {
    struct reads *r = calloc(1, sizeof *r);
    if (r && (r->ep = epoll_create1(EPOLL_CLOEXEC)) < 0) { free(r); r = NULL; }
    return r;
}

void reads_free(struct reads *r) {
    for (int i = 0; i < r->n_slots; i++) free(r->slots[i].frame), free(r->slots[i].stamps), free(r->slots[i].text);
    close(r->ep);
    free(r->slots), free(r);
}

int reads_fd(const struct reads *r) { return r->ep; }

/* Watch a socket that does not block.  The slot; -errno. */
int reads_add(struct reads *r, int fd) {
    int i = 0;
    while (i < r->n_slots && r->slots[i].fd >= 0) i++; /* a new connection is rare, and costs a hundred times this */
    if (i == r->n_slots) {
        int n = r->n_slots * 2 + 64;
        struct slot *grown = realloc(r->slots, sizeof *grown * (size_t)n);
        if (!grown) return -ENOMEM;
        memset(grown + r->n_slots, 0, sizeof *grown * (size_t)(n - r->n_slots));
        for (int k = r->n_slots; k < n; k++) grown[k].fd = -1;
        r->slots = grown, r->n_slots = n;
    }
    struct slot *s = &r->slots[i];
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)s->generation << 32 | (uint32_t)i};
    if (epoll_ctl(r->ep, EPOLL_CTL_ADD, fd, &event)) return -errno;
    s->fd = fd, s->armed = 0, s->n = s->text_len = s->body = 0;
    return i;
}

/* Its user is about to close the socket, which takes it out of epoll, or has closed it. */
void reads_drop(struct reads *r, int slot) {
    struct slot *s = &r->slots[slot];
    s->fd = -1, s->armed = 0, s->generation++;
    s->n = s->text_len = s->body = 0;
}

/* Store whole chunks with such events from now on.  0, or -ENOMEM: nothing is stored. */
int reads_arm(struct reads *r, int slot, const char *head, size_t head_len, const char *tail, size_t tail_len, size_t most, size_t room) {
    struct slot *s = &r->slots[slot];
    size_t size = head_len + tail_len;
    s->armed = 0;
    if (size > s->frame_cap) {
        char *grown = realloc(s->frame, size);
        if (!grown) return -ENOMEM;
        s->frame = grown, s->frame_cap = size;
    }
    memcpy(s->frame, head, head_len), memcpy(s->frame + head_len, tail, tail_len);
    s->head = head_len, s->tail = tail_len, s->most = most, s->room = room, s->armed = 1;
    return 0;
}

/* Is it text that JSON shows as it is: UTF-8 without controls, quotes and backslashes?  (RFC 8259, RFC 3629) */
static int is_plain(const unsigned char *p, size_t n) {
    for (const unsigned char *end = p + n; p < end;) {
        unsigned char c = *p++;
        if (c < 0x80) {
            if (c < 0x20 || c == '"' || c == '\\') return 0;
            continue;
        }
        int more = c >= 0xc2 && c <= 0xdf ? 1 : c >= 0xe0 && c <= 0xef ? 2 : c >= 0xf0 && c <= 0xf4 ? 3 : 0;
        if (!more || end - p < more) return 0;
        if ((c == 0xe0 && *p < 0xa0) || (c == 0xed && *p > 0x9f) || (c == 0xf0 && *p < 0x90) || (c == 0xf4 && *p > 0x8f)) return 0;
        for (; more--; p++) if ((*p & 0xc0) != 0x80) return 0;
    }
    return 1;
}

static int store(struct slot *s, const char *text, size_t len, int64_t now) {
    if (s->n == s->stamps_cap) {
        size_t cap = s->stamps_cap * 2 + 32;
        int64_t *grown = realloc(s->stamps, cap * sizeof *grown);
        if (!grown) return 0;
        s->stamps = grown, s->stamps_cap = cap;
    }
    if (s->text_len + len + 1 > s->text_cap) {
        size_t cap = (s->text_len + len + 1) * 2;
        char *grown = realloc(s->text, cap);
        if (!grown) return 0;
        s->text = grown, s->text_cap = cap;
    }
    s->stamps[s->n++] = now;
    memcpy(s->text + s->text_len, text, len);
    s->text_len += len;
    s->text[s->text_len++] = 0;
    return 1;
}

/* How much of these bytes is whole chunks with usual events; they are stored. */
static size_t take(struct slot *s, const char *data, size_t size, int64_t now) {
    size_t done = 0;
    while (done < size && s->n * 8 + s->text_len < STORED_BYTES) {
        const char *p = data + done, *end = data + size;
        size_t body = 0;
        int digits = 0;
        for (; p < end && digits < 8; p++, digits++) {
            int d = *p >= '0' && *p <= '9' ? *p - '0' : *p >= 'a' && *p <= 'f' ? *p - 'a' + 10 : *p >= 'A' && *p <= 'F' ? *p - 'A' + 10 : -1;
            if (d < 0) break;
            body = body << 4 | (size_t)d;
        }
        if (!digits || end - p < 2 || p[0] != '\r' || p[1] != '\n') break;
        p += 2;
        if (body <= s->head + s->tail || body > s->most || body > s->room || (size_t)(end - p) < body + 2) break;
        size_t len = body - s->head - s->tail;
        if (p[body] != '\r' || p[body + 1] != '\n') break;
        if (memcmp(p, s->frame, s->head) || memcmp(p + s->head + len, s->frame + s->head, s->tail)) break;
        if (!is_plain((const unsigned char *)p + s->head, len) || !store(s, p + s->head, len, now)) break;
        s->room -= body, s->body += body;
        done = (size_t)(p - data) + body + 2;
    }
    return done;
}

static size_t aligned(size_t n) { return (n + 7) & ~(size_t)7; }

/* Move the stored events of a slot into the buffer, in front of what a notice adds. */
static void hand_over(struct slot *s, char *buffer, size_t *used, struct notice *out) {
    out->at = (uint32_t)*used, out->n = (uint32_t)s->n, out->text_len = (uint32_t)s->text_len, out->body = (uint32_t)s->body;
    if (s->n) memcpy(buffer + *used, s->stamps, s->n * 8), memcpy(buffer + *used + s->n * 8, s->text, s->text_len);
    *used += s->n * 8 + s->text_len;
    s->n = s->text_len = s->body = 0;
    if (s->text_cap > KEPT_BYTES) free(s->text), s->text = NULL, s->text_cap = 0;
    if (s->stamps_cap * 8 > KEPT_BYTES) free(s->stamps), s->stamps = NULL, s->stamps_cap = 0;
}

/* What is stored of one slot, now; the buffer holds at least 2 * STORED_BYTES. */
void reads_collect(struct reads *r, int slot, char *buffer, struct notice *out) {
    size_t used = 0;
    *out = (struct notice){.slot = slot, .size = NOTHING};
    hand_over(&r->slots[slot], buffer, &used, out);
}

/* Read what is there, until something is due (ns), the notices or the buffer are full, or all was read once.
 * The number of notices; *more: 1 where it stopped before the end. */
int reads_poll(struct reads *r, int64_t due, char *buffer, size_t size, struct notice *out, int most, int *more) {
    int n = 0;
    size_t used = 0;
    *more = 1;
    if (r->next >= r->n_ready) {
        r->next = 0;
        if ((r->n_ready = epoll_wait(r->ep, r->ready, READY, 0)) < 0) r->n_ready = 0;
    }
    while (r->next < r->n_ready) {
        uint64_t which = r->ready[r->next].data.u64;
        struct slot *s = &r->slots[(uint32_t)which];
        if (n == most || size - used < READ_BYTES + aligned(s->n * 8 + s->text_len) + 2 * STORED_BYTES + 16) return n;
        r->next++;
        if (s->fd < 0 || s->generation != which >> 32) continue;
        /* Room for what was stored before, and for what this read may add to it, is left in front. */
        char *data = buffer + size - READ_BYTES;
        ssize_t got = recv(s->fd, data, READ_BYTES, 0);
        int64_t now = now_ns();
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        size_t taken = got > 0 && s->armed ? take(s, data, (size_t)got, now) : 0;
        if (got > 0 && taken == (size_t)got && s->n * 8 + s->text_len < STORED_BYTES) {
            if (now >= due) return n;
            continue;
        }
        struct notice *one = &out[n++];
        used = aligned(used);
        one->slot = (int32_t)(uint32_t)which, one->now = now;
        one->size = got < 0 ? -errno : got == 0 ? 0 : taken == (size_t)got ? NOTHING : (int32_t)((size_t)got - taken);
        hand_over(s, buffer, &used, one);
        if (one->size != NOTHING) s->armed = 0;
        if (one->size > 0) memcpy(buffer + used, data + taken, (size_t)one->size), used += (size_t)one->size;
        if (now >= due) return n;
    }
    *more = 0;
    return n;
}
