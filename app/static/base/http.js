// What the server answers, and never an error's text taken for it.
import { duration } from 'formats'

const RETRY_MS = 1000
const LONGEST_MS = 30_000
export const pause = (ms = RETRY_MS) =>
  new Promise((resolve) => {
    setTimeout(resolve, ms)
  })

/** Return the waits before retries: doubled each time, with a random part so that pages do not retry together. */
export const patience = () => {
  let tries = 0
  return {
    next: () => Math.min(RETRY_MS * 2 ** tries++, LONGEST_MS) * (0.5 + Math.random() / 2),
    reset: () => {
      tries = 0
    },
  }
}

/** A status is read aloud whenever it changes: so often at most. */
const SAID_EVERY = 10
/** @type {Intl.DateTimeFormatOptions} */
const TO_THE_SECOND = { hour: '2-digit', minute: '2-digit', second: '2-digit' }
/**
 * Text of the badge while the server does not answer. Both in milliseconds.
 * @param {number} receivedAt
 * @param {number} now
 */
export const silence = (receivedAt, now) => {
  const seconds = Math.floor((now - receivedAt) / 1000 / SAID_EVERY) * SAID_EVERY
  if (!seconds) return 'reconnecting…'
  return `the server has not answered for ${duration(seconds)}; numbers are of ${new Date(receivedAt).toLocaleTimeString('en-GB', TO_THE_SECOND)}`
}

class FinalError extends Error {}
/** Asking again leads nowhere: the server has understood, and will not. @param {number} status */
const isFinal = (status) => status >= 400 && status < 500 && status !== 408 && status !== 429

/** Say at the top of the page what a response lacks, because it is damaged. @param {Response} answer */
const showDamage = (answer) => {
  const [text, shown] = [answer.headers.get('Halfstep-Damaged'), document.querySelector('[data-damage]')]
  if (!text || !shown || shown.dataset.damage || shown.textContent.includes(text)) return
  shown.append(shown.textContent ? ` ${text}` : text)
  shown.hidden = false
}

/**
 * Say what is damaged of these runs, whatever is drawn of them.
 * @param {string} api
 * @param {string} runs comma-separated
 */
export const showDamageOf = async (api, runs) => {
  const answer = await fetch(`${api}/damage?runs=${runs}`).catch(() => null)
  if (!answer?.ok) return
  const { text } = await answer.json()
  Object.assign(document.querySelector('[data-damage]'), { textContent: text, hidden: !text }).dataset.damage = 'all'
}

/** @param {string} url @returns {Promise<Response>} */
export const fetched = async (url) => {
  const answer = await fetch(url)
  showDamage(answer)
  if (isFinal(answer.status)) throw new FinalError(`${url}: ${answer.status}`)
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`)
  return answer
}

/** Fetch; retry until the server answers, with an error too. @param {string} url @returns {Promise<Response>} */
export const insisted = async (url) => {
  const waits = patience()
  for (;;) {
    try {
      return await fetched(url)
    } catch (error) {
      if (error instanceof FinalError) throw error
      await pause(waits.next())
    }
  }
}

/** One fetch at a time, and once more for what came meanwhile. @param {() => Promise<void>} refetch */
export const inTurn = (refetch) => {
  let [isFetching, isWanted] = [false, false]
  return async () => {
    isWanted = true
    if (isFetching) return
    isFetching = true
    try {
      while (isWanted) {
        isWanted = false
        await refetch()
      }
    } finally {
      isFetching = false
    }
  }
}
