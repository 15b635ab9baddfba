// CUDA's words for a C++ compiler, so that the kernels can be tested where there is no GPU: included before the first
// line of a .cu file by cuda_on_cpu.py.
//
// Blocks run one after another. The warps of a block do so as well, each as far as the next barrier of the block, and
// its threads take turns as far as the next of the warp: the same result every time, and if a barrier is missing, what
// is read too early is found to be no number. In every second block all of that goes backwards (in the others, if
// CUDA_ON_CPU_BACKWARDS is set). A barrier that some of its threads never reach is reported, not waited for.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static __attribute__((section("shared_memory")))
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)
#define __syncthreads() cuda_on_cpu::wait_for_block()

using std::isnan;
using std::max;
using std::min;

struct dim3 {
    unsigned x, y, z;
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;

// Where the section of all that is shared begins and ends, in this library.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_shared_memory[], __stop_shared_memory[];

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};

static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// The C library has functions of these names, of its own.
#define __log2f(x) (std::log2((float)(x)) * (1.0f + 2.4e-7f))  // as coarse as on a GPU
#define __logf(x) std::log((float)(x))
#define __expf(x) std::exp((float)(x))
#define __sinf(x) std::sin((float)(x))
#define __cosf(x) std::cos((float)(x))
#define __sincosf(x, sin, cos) sincosf(x, sin, cos)
#define __powf(x, y) std::pow((float)(x), (float)(y))

static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
static inline float __saturatef(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((std::uint64_t)a * b) >> 32); }

template <class To, class From>
static inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return same_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return same_bits<double>(x); }

template <class T>
struct Same {
    using type = T;
};

template <class T>
static inline T __ldcg(const T* from) {
    return *from;
}

template <class T>
static inline T __ldg(const T* from) {
    return *from;
}

template <class T>
static inline T atomicAdd(T* to, typename Same<T>::type value) {
    const T before = *to;
    *to = before + value;
    return before;
}

template <class T>
static inline T atomicMax(T* to, typename Same<T>::type value) {
    const T before = *to;
    *to = before < value ? value : before;
    return before;
}

namespace cuda_on_cpu {

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 256 * 1024;

enum class State { ready, at_block_barrier, at_warp_barrier, done };

// Under way to shared memory: `bytes` of `all`, zeros behind.
struct Copy {
    void* to;
    const void* from;
    int bytes, all;
};

struct Thread {
    jmp_buf place;
    bool begun = false;
    std::unique_ptr<char[]> stack;
    State state = State::done;
    dim3 index = {0, 0, 0};
    unsigned rank = 0;  // in the block
    unsigned mask = 0;  // of the warp's barrier it waits at
    std::uint64_t deposit[2] = {0, 0};  // what it offers to its warp, in this exchange and in the last
    unsigned exchanges = 0;
    std::vector<Copy> sent;  // since the last group was closed
    std::deque<std::vector<Copy>> groups;
};

struct Block {
    std::vector<Thread> threads;
    jmp_buf scheduler;
    Thread* running = nullptr;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    std::string trouble;
};

static Block block;

static inline void pause(State state) {
    Thread* self = block.running;
    self->state = state;
    if (_setjmp(self->place) == 0) _longjmp(block.scheduler, 1);
}

static inline void wait_for_block() { pause(State::at_block_barrier); }

static inline void wait_for_warp(unsigned mask) {
    block.running->mask = mask;
    pause(State::at_warp_barrier);
}

// A thread of one block is that of the next.
static inline void enter() {
    for (;;) {
        block.body(block.argument);
        pause(State::done);
    }
}

// Lets a thread run until it pauses. It gets a stack of its own once; jumps, unlike exchanged contexts, do not ask the
// system each time.
static inline void go_on(Thread& t) {
    block.running = &t;
    threadIdx = t.index;
    if (_setjmp(block.scheduler) != 0) return;
    if (t.begun) _longjmp(t.place, 1);
    t.begun = true;
    ucontext_t begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = t.stack.get();
    begin.uc_stack.ss_size = STACK;
    begin.uc_link = nullptr;
    makecontext(&begin, enter, 0);
    setcontext(&begin);
}

// Lets threads of a warp go on that wait at a barrier which all of its mask have reached. Returns whether there were any.
static inline bool release(unsigned first) {
    auto& threads = block.threads;
    const unsigned end = std::min<std::size_t>(first + WARP, threads.size());
    bool any = false;
    for (unsigned rank = first; rank < end; rank++) {
        if (threads[rank].state != State::at_warp_barrier) continue;
        const unsigned mask = threads[rank].mask;
        const auto each = [&](const auto& act) {
            for (unsigned other = first; other < end; other++)
                if (mask >> (other - first) & 1) act(threads[other]);
        };
        bool complete = mask >> (rank - first) & 1;
        each([&](const Thread& t) { complete = complete && t.state == State::at_warp_barrier && t.mask == mask; });
        if (complete) each([](Thread& t) { t.state = State::ready; });
        any = any || complete;
    }
    return any;
}

static inline bool run_block() {
    // What a block finds in its shared memory is anything; here no number at all, so that reading it shows.
    if (__start_shared_memory) std::memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    auto& threads = block.threads;
    for (auto& t : threads) {
        t.state = State::ready;
        t.exchanges = 0;
        t.sent.clear();
        t.groups.clear();
    }
    static const bool turned = std::getenv("CUDA_ON_CPU_BACKWARDS");
    const bool backwards = (blockIdx.x + blockIdx.y + blockIdx.z) % 2 != turned;
    const unsigned count = threads.size(), warps = (count + WARP - 1) / WARP;
    const auto all = [&](State state) {
        return std::all_of(threads.begin(), threads.end(), [&](const Thread& t) { return t.state == state; });
    };
    for (;;) {
        for (unsigned w = 0; w < warps; w++) {
            const unsigned first = (backwards ? warps - 1 - w : w) * WARP;
            do {
                for (unsigned lane = 0; lane < WARP; lane++) {
                    const unsigned rank = first + (backwards ? WARP - 1 - lane : lane);
                    if (rank < count && threads[rank].state == State::ready) go_on(threads[rank]);
                }
            } while (release(first));
        }
        if (all(State::done)) return true;
        if (!all(State::at_block_barrier)) break;
        for (auto& t : threads) t.state = State::ready;
    }
    unsigned at_block = 0, at_warp = 0, gone = 0;
    for (auto& t : threads) {
        at_block += t.state == State::at_block_barrier;
        at_warp += t.state == State::at_warp_barrier;
        gone += t.state == State::done;
    }
    char text[300];
    std::snprintf(text, sizeof text,
                  "block (%u, %u, %u): a barrier that some threads never reach: %u wait for the block, %u for their "
                  "warp, %u have ended",
                  blockIdx.x, blockIdx.y, blockIdx.z, at_block, at_warp, gone);
    block.trouble = text;
    threads.clear();  // those that hang are no use to the next block
    return false;
}

template <class Body>
static int run_grid(const unsigned* shape, Body body) {
    gridDim = {shape[0], shape[1], shape[2]};
    blockDim = {shape[3], shape[4], shape[5]};
    block.trouble.clear();
    const unsigned count = blockDim.x * blockDim.y * blockDim.z;
    if (count == 0 || count > 1024 || gridDim.x == 0 || gridDim.y == 0 || gridDim.z == 0 || gridDim.y > 65535 ||
        gridDim.z > 65535) {
        block.trouble = "a grid or a block of a size that CUDA does not take";
        return 1;
    }
    if (block.threads.size() != count) {
        block.threads.clear();
        block.threads.resize(count);
    }
    for (unsigned rank = 0; rank < count; rank++) {
        Thread& t = block.threads[rank];
        if (!t.stack) t.stack = std::make_unique<char[]>(STACK);
        t.rank = rank;
        t.index = {rank % blockDim.x, rank / blockDim.x % blockDim.y, rank / (blockDim.x * blockDim.y)};
    }
    block.argument = &body;
    block.body = [](void* argument) { (*static_cast<Body*>(argument))(); };
    for (unsigned z = 0; z < gridDim.z; z++) {
        for (unsigned y = 0; y < gridDim.y; y++) {
            for (unsigned x = 0; x < gridDim.x; x++) {
                blockIdx = {x, y, z};
                if (!run_block()) return 1;
            }
        }
    }
    return 0;
}

template <class... Parameters, std::size_t... I>
static int unpack(void (*kernel)(Parameters...), const unsigned* shape, void** args, std::index_sequence<I...>) {
    return run_grid(shape, [&] { kernel(*static_cast<std::remove_cv_t<Parameters>*>(args[I])...); });
}

// Runs a kernel whose i-th argument args[i] points to; what went wrong, if the result is not 0, is in `trouble`.
template <class... Parameters>
static int run(void (*kernel)(Parameters...), const unsigned* shape, void** args) {
    return unpack(kernel, shape, args, std::index_sequence_for<Parameters...>{});
}

template <class T>
constexpr char letter() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, int>) return 'i';
    if (std::is_same_v<T, double>) return 'd';
    return '?';
}

// One letter for each of a kernel's parameters.
template <class... Parameters>
static const char* signature(void (*)(Parameters...)) {
    static const char letters[] = {letter<Parameters>()..., 0};
    return letters;
}

// What the lane `source(my lane)` offers; my own value if that is outside of my part of the warp.
template <class T, class Source>
static T exchange(unsigned mask, T value, int width, Source source) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a number");
    Thread* self = block.running;
    const unsigned turn = self->exchanges++ % 2, lane = self->rank % WARP;
    std::memcpy(&self->deposit[turn], &value, sizeof(T));
    wait_for_warp(mask);
    const int part = (int)lane / width * width, from = source((int)lane - part);
    if (from < 0 || from >= width) return value;
    const unsigned other = self->rank - lane + part + from;
    if (other >= block.threads.size()) return value;
    T result;
    std::memcpy(&result, &block.threads[other].deposit[turn], sizeof(T));
    return result;
}

}  // namespace cuda_on_cpu

// Copies that go on while a thread does something else: here nothing moves before the thread waits for it.
static inline void copy_later(void* to, const void* from, int bytes, int all) {
    cuda_on_cpu::block.running->sent.push_back({to, from, bytes, all});
}

static inline void copies_are_a_group() {
    auto& self = *cuda_on_cpu::block.running;
    self.groups.push_back(std::move(self.sent));
    self.sent.clear();
}

// All groups but the last `left`.
static inline void copy_now(int left) {
    auto& groups = cuda_on_cpu::block.running->groups;
    for (; (int)groups.size() > left; groups.pop_front())
        for (const auto& copy : groups.front()) {
            std::memcpy(copy.to, copy.from, copy.bytes);
            std::memset((char*)copy.to + copy.bytes, 0, copy.all - copy.bytes);
        }
}

static inline void __syncwarp(unsigned mask = 0xffffffffu) { cuda_on_cpu::wait_for_warp(mask); }

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return cuda_on_cpu::exchange(mask, value, width, [=](int) { return lane & (width - 1); });
}

template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return cuda_on_cpu::exchange(mask, value, width, [=](int self) { return self ^ lanes; });
}

template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return cuda_on_cpu::exchange(mask, value, width, [=](int self) { return self + (int)lanes; });
}

template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return cuda_on_cpu::exchange(mask, value, width, [=](int self) { return self - (int)lanes; });
}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) {
        // Lanes outside of the mask have no vote.
        const int vote = __shfl_sync(mask, predicate != 0 ? 1 : 0, lane);
        if (mask >> lane & 1) votes |= (unsigned)vote << lane;
    }
    return votes;
}

static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

extern "C" const char* cuda_on_cpu_trouble() { return cuda_on_cpu::block.trouble.c_str(); }
