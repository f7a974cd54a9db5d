// Answers the CPUID instructions that as_processor.py replaced by a breakpoint, as a lesser processor would. Preloaded.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>

enum { EAX, EBX, ECX, EDX };

// Features that a processor has from a level on. QSAMPLE_CPUID names the level: those of higher ones are taken away.
static const struct { unsigned level, leaf, subleaf, answer, bits; } features[] = {
    // 4: products of 8-bit integers in AVX-512 and AVX, AMX, bfloat16
    {4, 7, 0, ECX, 1u << 11},
    {4, 7, 0, EDX, 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25},
    {4, 7, 1, EAX, 1u << 4 | 1u << 5},
    {4, 7, 1, EDX, 1u << 4 | 1u << 5 | 1u << 10 | 1u << 19},
    // 3: AVX-512
    {3, 7, 0, EBX, 1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31},
    {3, 7, 0, ECX, 1u << 1 | 1u << 6 | 1u << 8 | 1u << 9 | 1u << 10 | 1u << 12 | 1u << 14},
    {3, 7, 0, EDX, 1u << 2 | 1u << 3 | 1u << 8},
    // 2: AVX2, FMA and F16C
    {2, 7, 0, EBX, 1u << 5},
    {2, 1, 0, ECX, 1u << 12 | 1u << 29},
    // 1: AVX and the system's support for it
    {1, 1, 0, ECX, 1u << 26 | 1u << 27 | 1u << 28},
};
static unsigned level;

static void answer(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned leaf = registers[REG_RAX], subleaf = registers[REG_RCX], answers[4];
    __cpuid_count(leaf, subleaf, answers[EAX], answers[EBX], answers[ECX], answers[EDX]);
    for (unsigned i = 0; i < sizeof features / sizeof *features; i++) {
        // Leaves below 7 have no subleaves: RCX holds anything.
        if (features[i].level > level && features[i].leaf == leaf && (leaf != 7 || features[i].subleaf == subleaf))
            answers[features[i].answer] &= ~features[i].bits;
    }
    registers[REG_RAX] = answers[EAX], registers[REG_RBX] = answers[EBX];
    registers[REG_RCX] = answers[ECX], registers[REG_RDX] = answers[EDX];
}

__attribute__((constructor)) static void begin(void) {
    const char *given = getenv("QSAMPLE_CPUID");
    if (!given) return;
    level = atoi(given);
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGTRAP, &action, NULL);
}
