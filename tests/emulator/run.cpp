// Runs token.cu on the emulated machine; a library for test_token.py.

#include "token.cu"

struct Arguments {
    const long long *ids, *pos;
    const u16 *wte, *wpe;
    const float *gamma, *beta;
    u16 *logits;
    u32 *turns;
    Mailbox *mail;
    Blocks blocks;
};

static Arguments arguments;
static int room;

static void thread() {
    const Arguments &a = arguments;
    token(
        a.ids, a.pos, a.wte, a.wpe, a.gamma, a.beta, a.logits, a.turns, a.mail, room, 1e-5f, a.blocks
    );
    running->done = true;
    progress++;
    let_others_run();
}

// 0 once all threads are done, 1 if they wait for each other; `seed` is that of their order.
extern "C" int run(const Arguments *given, const Region *allowed, int count, int N, int seed) {
    constexpr size_t STACK = 32768;
    arguments = *given, room = N;
    regions.assign(allowed, allowed + count);
    srand(seed);
    std::vector<Group> blocks(BLOCKS), warps(BLOCKS * WARPS);
    std::vector<Fiber> fibers(BLOCKS * THREADS);
    std::vector<char> stacks(STACK * fibers.size());
    // Whoever reads shared memory that was never written finds NaN.
    for (Group &block : blocks) block.size = THREADS, block.memory.assign(sizeof(Shared), '\xff');
    for (Group &warp : warps) warp.size = 32;
    for (unsigned i = 0; i < fibers.size(); i++) {
        Fiber &fiber = fibers[i];
        fiber.thread.x = i % THREADS, fiber.place.x = i / THREADS;
        fiber.block = &blocks[i / THREADS], fiber.warp = &warps[i / 32];
        void **top = (void **)((uintptr_t)&stacks[STACK * (i + 1) - 64] / 16 * 16);
        *--top = nullptr, *--top = (void *)thread;
        fiber.stack = top - 6;
    }
    size_t left = fibers.size();
    for (int quiet = 0; left && quiet < 100;) {
        long before = progress;
        size_t start = rand() % fibers.size();
        unsigned late = rand() % BLOCKS;
        for (size_t i = 0; i < fibers.size(); i++) {
            running = &fibers[(start + i) % fibers.size()];
            if (running->done || (running->place.x == late && rand() % 2)) continue;
            switch_stacks(&scheduler, running->stack);
            left -= running->done;
        }
        quiet = progress == before ? quiet + 1 : 0;
    }
    return left > 0;
}

extern "C" long mailbox() { return sizeof(Mailbox); }
