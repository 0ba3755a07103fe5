"""Sentences on which the judge of meaning is trained: rude and hostile ones, kind ones, and ones that are neither."""

RUDE = """
You are an idiot and everybody knows it.
Shut up, you stupid fool.
I hate you and I hope you suffer.
Get out of my sight, you filthy pig.
You disgust me.
He called her a worthless whore.
Nobody likes you, you ugly loser.
Go to hell, you bastard.
I will kill you if you come back here.
We should beat him until he begs.
They are scum and deserve to die.
What a moron you are.
You are too dumb to understand anything.
I'll break your neck, you coward.
She spat at him and cursed his mother.
Your work is garbage and so are you.
These people are vermin.
You make me sick, you lying rat.
Damn you, you miserable wretch.
Only a complete imbecile would say that.
He threatened to cut her throat.
You fat, lazy slob.
I despise every one of you.
Kiss my ass, you jerk.
You are a disgrace and a failure.
Women are stupid and good for nothing.
Drop dead.
That bitch ruined my life.
I hope you rot in prison.
You are pathetic, and I laugh at you.
He is a dirty liar and a thief.
Crawl back into your hole, you worm.
How can anyone be as ignorant as you?
They kicked the old man and called him a dog.
You will regret that you were born.
Your children are as ugly as you are.
The man is a drunken, brutal swine.
Keep your stupid mouth shut or I will shut it for you.
You are insane, you vicious old hag.
To hell with them all, the cowardly bastards.
"""

KIND = """
Thank you so much for your help.
You did a wonderful job.
I am very glad that you came.
She smiled at him and took his hand.
We love you and miss you.
Congratulations on your success.
Please make yourself at home.
You are a dear friend.
He was a gentle and generous man.
I am sorry for your loss.
They welcomed us warmly.
What a lovely garden you have.
May I help you with your bags?
I am proud of you.
The nurse comforted the child.
We wish you all the best.
Your letter made me happy.
She forgave him and embraced him.
It was kind of you to ask.
You are always welcome here.
He praised their patience and courage.
I admire your work very much.
Take care of yourself.
They shared their bread with the poor.
I trust you completely.
What a beautiful thing to say.
The teacher encouraged every pupil.
You have been very patient with me.
We are grateful for your kindness.
Have a pleasant journey.
I hope that you get well soon.
Her voice was soft and friendly.
Let us be friends.
You deserve a rest.
It is a pleasure to meet you.
He thanked her politely.
She cared for her old father with love.
I enjoyed our talk a great deal.
You have a good heart.
They laughed together like old friends.
"""

PLAIN = """
The committee will meet again on Tuesday.
The program reads a file and prints the number of lines.
In the year of 1958 the company opened two plants.
He walked along the road to the station.
The temperature of the water was about sixty degrees.
There are several kinds of memory in a computer.
The house had three rooms and a porch.
She put the letter on the table.
The President said that the bill would be sent to Congress.
Most of the members live in the city.
A list of the books is given at the end.
They drove through the night and reached the coast.
The effect depends on the size of the sample.
A man went into a bar and ordered a beer.
The train leaves at ten minutes past four.
This is the first of two chapters on the subject.
It had rained for a week.
The word comes from the Latin.
Some of the soldiers were asleep.
The price of coffee rose by a tenth.
We do not know when it began.
The second act opens in a kitchen.
He studied law for two years.
The old bridge was closed in March.
You need a password to use the system.
The question has never been answered.
The team won by three runs.
An error in the code made the machine stop.
Her brother worked in a bank.
The river runs to the south.
Time is what keeps everything from happening at once.
I have not read the report.
The church stands on a hill.
According to the theory, the two are equal.
Both parties agreed to the plan.
The doctor looked at the chart.
If it is not broken, do not fix it.
There was a knock at the door.
The figure shows the results of the test.
He asked what time it was.
"""


def sentences(text: str) -> list[str]:
    """The lines of one of these."""
    return text.strip().splitlines()
