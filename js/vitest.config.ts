import { defineConfig } from "vitest/config";

const of = (name: string, include: string[], testTimeout: number) => ({ test: { name, include, testTimeout, hookTimeout: testTimeout } });

// "node" takes seconds; "browser" needs a Chromium, and takes minutes.
export default defineConfig({
  test: { projects: [of("node", ["test/*.test.ts"], 120_000), of("browser", ["test/browser/*.test.ts"], 400_000)] },
});
