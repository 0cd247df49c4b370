// The line of `halfstep show` that says how much of its folder has been read.
import { still } from 'dom_updates'
import { insisted } from 'http'

const LINE = '[data-reading]'
const SECONDS = 1

while (document.querySelector(LINE)) {
  await new Promise((done) => setTimeout(done, SECONDS * 1000))
  const page = new DOMParser().parseFromString(await (await insisted(location.href)).text(), 'text/html')
  const now = page.querySelector(LINE)
  still(() => document.querySelector(LINE)?.replaceWith(...(now ? [document.adoptNode(now)] : [])))
}
