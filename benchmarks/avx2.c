/* Shows a program a processor without AVX-512, AVX-VNNI and AMX, at full speed: libraries choose their AVX2 kernels.

       cc -O2 -shared -fPIC -o build/avx2.so benchmarks/avx2.c
       LD_PRELOAD=$PWD/build/avx2.so python benchmarks/decode.py ...

   Linux lets a process take CPUID away from itself (arch_prctl(2), ARCH_SET_CPUID); the processor needs the flag
   cpuid_fault of /proc/cpuinfo. The instruction then raises SIGSEGV, and the handler answers in its place, with bits left
   out. Threads and children inherit this. A program with a handler of its own for SIGSEGV, such as Python's faulthandler,
   has to do without that. What a compiler chose (llama.cpp's flags) stays as it is. */

#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { SET_CPUID = 0x1012 };

static void answer(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) { /* a fault of the program */
        signal(signal_number, SIG_DFL);
        return; /* it comes again */
    }
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    syscall(SYS_arch_prctl, SET_CPUID, 1);
    __cpuid_count(leaf, part, a, b, c, d);
    syscall(SYS_arch_prctl, SET_CPUID, 0);
    if (leaf == 7 && part == 0) {
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31); /* AVX-512 F to VL */
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14); /* VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ */
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25); /* the rest, and AMX */
    } else if (leaf == 7 && part == 1) {
        a &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23); /* AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA */
        d &= ~(1u << 4 | 1u << 5 | 1u << 10 | 1u << 19); /* AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16, AVX10 */
    } else if (leaf == 0x24) {
        a = b = c = d = 0; /* AVX10 */
    }
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, NULL);
    if (syscall(SYS_arch_prctl, SET_CPUID, 0) != 0) {
        fputs("avx2.so: this processor or kernel cannot take CPUID away (no cpuid_fault in /proc/cpuinfo)\n", stderr);
        _exit(70);
    }
}
