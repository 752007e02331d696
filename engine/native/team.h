/* A team of threads that runs phases of tasks.  Nobody waits for anybody in particular: a phase is over when its tasks
 * are, whoever did them, and the thread that ends the last one opens the next phase.  A thread that the system has put
 * aside delays only the task that it holds.
 *
 *   state   number of the phase | tasks in it | next task to take; a task is taken by compare-and-swap on the whole word,
 *           so that a thread that was away for long cannot take one of a phase it does not know
 *   idle    a thread without a task pauses, then yields, then sleeps until a phase opens */
#ifndef TAILSPAN_TEAM_H
#define TAILSPAN_TEAM_H
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define FIELD 20 /* bits of a task number */
#define MOST_TASKS ((1 << FIELD) - 1)
#define PAUSES 200        /* a few microseconds */
#define YIELD_NS 50000    /* then give way for so long before going to sleep */

struct job { /* what a team works on */
    int (*tasks)(void *of, int phase);                            /* how many tasks a phase has; -1: there is no such phase */
    void (*run)(void *of, int phase, int task, int thread);       /* do one */
    void *of;
};
struct team {
    _Atomic uint64_t state;
    _Atomic uint32_t done, sleeping;
    _Atomic int over, leaving;
    struct job job;
    int phase; /* of the job; written by the thread that opens it */
    int threads;
    pthread_t *others;
    pthread_mutex_t lock;
    pthread_cond_t opened;
};
struct member {
    struct team *team;
    int number;
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static int has_task(uint64_t state) { return (state & MOST_TASKS) < (state >> FIELD & MOST_TASKS); }

static void wake(struct team *t) {
    if (atomic_load(&t->sleeping)) {
        pthread_mutex_lock(&t->lock);
        pthread_cond_broadcast(&t->opened);
        pthread_mutex_unlock(&t->lock);
    }
}
/* open the next phase that has tasks; called by one thread, when no task is open */
static void advance(struct team *t) {
    int n = 0;
    while (n == 0) n = t->job.tasks(t->job.of, ++t->phase);
    if (n < 0) atomic_store(&t->over, 1);
    else {
        uint64_t number = (atomic_load(&t->state) >> 2 * FIELD) + 1;
        atomic_store(&t->done, 0);
        atomic_store(&t->state, number << 2 * FIELD | (uint64_t)n << FIELD);
    }
    wake(t);
}
/* take a task and do it; 0: there was none */
static int work(struct team *t, int thread) {
    uint64_t state = atomic_load(&t->state);
    if (!has_task(state) || !atomic_compare_exchange_strong(&t->state, &state, state + 1)) return has_task(state);
    t->job.run(t->job.of, t->phase, (int)(state & MOST_TASKS), thread);
    if (atomic_fetch_add(&t->done, 1) + 1 == (uint32_t)(state >> FIELD & MOST_TASKS)) advance(t);
    return 1;
}
/* until there is a task, or *flag */
static void idle(struct team *t, _Atomic int *flag) {
#define READY (has_task(atomic_load(&t->state)) || atomic_load(flag))
    for (int i = 0; i < PAUSES; i++) {
        if (READY) return;
        relax();
    }
    for (int64_t until = now_ns() + YIELD_NS; now_ns() < until; sched_yield())
        if (READY) return;
    atomic_fetch_add(&t->sleeping, 1);
    pthread_mutex_lock(&t->lock);
    while (!READY) pthread_cond_wait(&t->opened, &t->lock);
    pthread_mutex_unlock(&t->lock);
    atomic_fetch_sub(&t->sleeping, 1);
#undef READY
}
static void *member_main(void *argument) {
    struct member me = *(struct member *)argument;
    free(argument);
    while (!atomic_load(&me.team->leaving))
        if (!work(me.team, me.number)) idle(me.team, &me.team->leaving);
    return NULL;
}
/* run a job to its end, the caller being thread 0 */
static void team_run(struct team *t, struct job job) {
    t->job = job, t->phase = -1;
    atomic_store(&t->over, 0);
    advance(t);
    while (!atomic_load(&t->over))
        if (!work(t, 0)) idle(t, &t->over);
}
static void team_end(struct team *t) {
    atomic_store(&t->leaving, 1);
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->opened);
    pthread_mutex_unlock(&t->lock);
    for (int i = 1; i < t->threads; i++) pthread_join(t->others[i], NULL);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->opened);
    free(t->others);
    free(t);
}
/* NULL when the threads cannot be had */
static struct team *team_start(int threads) {
    struct team *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->threads = 1;
    t->others = calloc((size_t)threads, sizeof *t->others);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->opened, NULL);
    for (; t->others && t->threads < threads; t->threads++) {
        struct member *member = malloc(sizeof *member);
        if (!member) break;
        *member = (struct member){t, t->threads};
        if (pthread_create(&t->others[t->threads], NULL, member_main, member)) {
            free(member);
            break;
        }
    }
    if (t->threads == threads) return t;
    team_end(t);
    return NULL;
}
#endif
