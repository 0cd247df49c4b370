// What the server answers, and never an error's text taken for it.

const RETRY_MS = 1000
export const pause = () => new Promise((resolve) => { setTimeout(resolve, RETRY_MS) })

/** @param {string} url @returns {Promise<Response>} */
export const fetched = async (url) => {
  const answer = await fetch(url)
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`)
  return answer
}

/** Ask until there is an answer. @param {string} url @returns {Promise<Response>} */
export const insisted = async (url) => {
  for (;;) {
    try {
      return await fetched(url)
    } catch {
      await pause()
    }
  }
}
